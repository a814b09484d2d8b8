"""Every table that needs an accelerator, in pieces that resume: `python benchmarks/accelerator`.

`pieces` lists them, also those of a quarter of an hour; `runner` plans, starts, cuts and resumes
them; `child` is the process of a piece; `clock` measures; `pictures` draws; `page` writes
docs/gpu.md. Each other file is a table: `run(settings)` yields its rows as they come.
"""
