"""File contents that an attacker or a bad disk might leave."""

JSON_BOMBS = {
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "whole": b"[" * 5_000 + b"]" * 5_000,
    "inside": b'{"x": ' + b"[" * 500 + b"]" * 500 + b"}",
    "no text": b"\xff\xfe\xfd",
    "digits": b'{"x": ' + b"1" * 10_000 + b"}",
    "another type": b"[3]",
}
"""Contents by what is wrong with them; the last is JSON, but not an object."""
