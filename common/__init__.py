"""What the scripts share, one subject a file. Model files import nothing from here."""
