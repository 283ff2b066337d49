"""The page about runs: served live by `jaxrl view`, written as one file by `jaxrl report`.

`reader` and `trajectories` read a workdir, `facts`, `responses` and `tokens` compute what is shown,
`viewer` answers the requests of the page (`page.js`), `server` serves it and `report` embeds it.
"""
