"""The example to read first: uploads are recorded, workers make thumbnails. Everything is in `app`."""
