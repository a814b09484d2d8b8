"""Every table that needs an accelerator, in pieces that resume: `python benchmarks/accelerator`.

`runner` plans, starts and resumes pieces; `child` is the process of a piece; `clock` measures;
`pictures` draws. Each other file is a table: `run(settings)` returns its rows.
"""
