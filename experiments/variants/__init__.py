"""Models that exist for one table of results/: a file for each model file that they change."""
