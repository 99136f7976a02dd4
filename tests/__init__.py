"""Tests: `cpu` and `gpu` hold them, in the package's folders; `support` holds what they share."""
