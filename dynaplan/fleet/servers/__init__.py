"""The servers that the processes of a deployment share: brought along, or named by the environment."""
