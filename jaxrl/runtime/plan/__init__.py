"""The memory plan of a run: `memory` computes, `advice` looks for settings, `display` shows both.

`search` knows what dense retrieval needs.
"""
