"""Replicas, model servers and a Valkey for measurements of picking, and a client that speaks Envoy's part."""
