"""The life of one worker process: register, keep the lease, serve and call endpoints, drain."""
