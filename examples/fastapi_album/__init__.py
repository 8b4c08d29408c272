"""An album in FastAPI: see app.py."""
