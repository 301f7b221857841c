"""CABLE's section 5.2: an encoder, how it is trained, and how well it finds documents."""
