"""Many processes at one generation batch: orders, claims, signs of life; and the worker that lives by them."""
