"""What Kubernetes, systemd, Prometheus and Grafana need of a deployment: templates, and what fills them."""
