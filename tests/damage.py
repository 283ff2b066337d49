"""Files as somebody hostile, or a bad disk, might leave them."""

JSON_BOMBS = {
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "whole": b"[" * 5_000 + b"]" * 5_000,
    "inside": b'{"x": ' + b"[" * 500 + b"]" * 500 + b"}",
    "no text": b"\xff\xfe\xfd",
    "digits": b'{"x": ' + b"1" * 10_000 + b"}",
    "another type": b"[3]",
}
"""By what is wrong with them; the last is JSON, but no object."""
