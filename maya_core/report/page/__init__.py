"""What the report page is made of: the template, its style and scripts, and the data of its two charts."""
