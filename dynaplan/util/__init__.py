"""The foundation: helpers for asyncio and the operating system that know nothing of dynaplan."""
