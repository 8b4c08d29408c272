"""An album without a framework: see app.py."""
