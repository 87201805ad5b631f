"""The real Karpenter beside idlegpu, on a control plane of its own."""
