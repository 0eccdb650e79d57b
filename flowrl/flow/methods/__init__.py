"""One file for each published method. Importing one is cheap: torch is imported when a hook runs."""
