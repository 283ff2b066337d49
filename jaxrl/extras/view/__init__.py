"""Web page about runs: served live by `jaxrl view`, written to one file by `jaxrl report`.

`reader` and `trajectories` read a workdir. `facts`, `responses` and `tokens` compute what the page
shows. `viewer` answers requests from the page (`page.js`). `server` serves it, `report` embeds it.
"""
