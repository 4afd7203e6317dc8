"""The one transfer of verified chunks: from several sources at once, resumable, and rationed by those that serve."""
