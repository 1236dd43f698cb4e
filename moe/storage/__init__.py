"""File access through fsspec, and local access confined to a folder."""
