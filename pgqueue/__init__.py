"""A job queue inside PostgreSQL."""
