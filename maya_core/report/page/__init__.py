"""The parts of the report page: the template, its style and scripts, and the data of its two charts."""
