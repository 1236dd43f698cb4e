"""Cost models: predicted memory and step time of a layout."""
