"""Taking a deployment to a cluster: the manifests that run there what runs, or could run, on this box."""
