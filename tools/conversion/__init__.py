"""Checkpoints of one format written in another, one tensor in memory at a time"""
