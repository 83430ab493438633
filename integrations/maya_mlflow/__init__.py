"""Maya in MLflow. Nothing here yet."""
