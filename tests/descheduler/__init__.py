"""The real descheduler beside idlegpu, on a control plane of its own."""
