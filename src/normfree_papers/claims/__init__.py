"""Claims: the record and its judge, stored results and training runs, and the ledger."""
