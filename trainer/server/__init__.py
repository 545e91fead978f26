"""The HTTP server: sessions and samplers of a Ray cluster behind the API that the `tinker` SDK speaks.

    SDK -> app (routes) -> training, sampling -> scheduler -> SessionGroup (ranks), SamplerGroup (engines)
                        \\-> clients (who has which session)  \\-> store (what lies on disk), futures (what is asked for later)

Nothing here trains or samples: verbs are those of `workers.learner.session_rank` and `workers.rollout.sampler`.
"""
