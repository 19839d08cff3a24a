"""The figures, tables and theorems of the four papers as claims that can be run and judged.

`normfree_papers.claims` holds the records, the judge and the ledger; each paper has a folder with its claims. Importing
this package loads neither.
"""
