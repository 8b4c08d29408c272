"""``python -m tests.soak``: see run.py."""

from tests.soak.run import main

if __name__ == "__main__":
    raise SystemExit(main())
