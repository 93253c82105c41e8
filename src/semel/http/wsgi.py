"""The door for WSGI apps."""
