"""Claims beyond the papers: our own questions, with statements and refutations written before the runs."""
