"""The connector for a cluster: its workloads, the decision written down, the executor that carries it out."""
