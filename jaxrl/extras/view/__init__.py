"""Web page about runs, served live by `jaxrl view` and written to a file by `jaxrl report`.

`reader` and `trajectories` read a workdir. `facts`, `responses` and `tokens` compute what the page
shows. `viewer` responds to requests from the page (`page.js`), `server` serves the page, and
`report` writes a static page with the responses embedded.
"""
