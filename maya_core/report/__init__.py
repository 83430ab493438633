"""What is said of an emulated job."""
