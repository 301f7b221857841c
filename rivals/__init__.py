"""What the four papers are compared with: a file a method, of the kind of model_cable.py."""
