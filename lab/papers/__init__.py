"""What each paper's tables are here: rows and flags, a file a paper."""
