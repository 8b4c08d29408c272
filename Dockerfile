# The image of the compose file: the worker and the command line, or, as target `tests`, the suite.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS base
WORKDIR /app
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY pgqueue ./pgqueue
COPY migrations ./migrations
COPY examples ./examples

FROM base AS tests
RUN pip install --no-cache-dir -e '.[test]'
COPY docs ./docs
COPY benchmarks ./benchmarks
COPY tests ./tests
COPY docker-compose.yml Dockerfile ./
ENTRYPOINT ["pytest", "-q", "-n", "2"]

FROM base AS worker
RUN pip install --no-cache-dir '.[demo]'
# An ordinary user, and the program itself as process 1: signals reach it without a shell in between.
RUN useradd --create-home pgqueue
USER pgqueue
ENTRYPOINT ["pgqueue"]
CMD ["worker", "--app", "examples.avatars.app:pq"]
