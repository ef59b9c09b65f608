"""``explain``: what gradfuse did with a model and why, as a table, a web page and pictures of what it learned."""
