"""The project: settings and pages."""
