"""``python -m tests.history``: see run.py."""

from tests.history.run import main

if __name__ == "__main__":
    raise SystemExit(main())
