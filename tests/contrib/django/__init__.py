"""pgqueue in Django: the project `settings` with its application `shop`, and what is tested with them."""
