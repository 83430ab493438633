"""Which configuration of a job to run: recipes, the search through their space, the cluster that meets a deadline, the gate of a CI."""
