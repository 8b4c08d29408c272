"""Photographs are uploaded, and developed by workers."""
