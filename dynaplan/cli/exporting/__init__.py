"""Files that other programs need of a deployment: Kubernetes' manifests, and those of Prometheus, Grafana."""
