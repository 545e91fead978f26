"""What a driver sees that joins a cluster: refusals, where pools lie, where ranks meet. Prints JSON.

Arguments: address of the head, address of the dashboard.
"""

import json
import sys

import ray
from ray.util.placement_group import placement_group_table

from rlframe.config import ConfigError
from trainer.cluster.placement import plan
from trainer.cluster.ray_cluster import reserve_pools, start_ray
from trainer.cluster.submit import Cluster
from trainer.settings.config import Config
from workers.learner.rank import LearnerRank


def job(head: str, ranks: int, workers: int, cpus: float = 1.0) -> Config:
    config = Config()
    config.model.builder = "tiny"
    config.cluster.address = head
    config.actor.ranks, config.actor.cpus, config.rollout.workers = ranks, cpus, workers
    return config


def refusal(config: Config) -> str:
    try:
        reserve_pools(plan(config), 1.0, print)
    except ConfigError as error:
        return str(error)
    return ""


def main(head: str, dashboard: str) -> None:
    config = job(head, 3, 2)
    start_ray(plan(config))
    found = {"too_much": refusal(job(head, 9, 1)), "too_large": refusal(job(head, 1, 1, cpus=5.0))}
    pools = reserve_pools(plan(config), 60.0, print)
    ips = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for name, pool in pools.items():
        nodes = placement_group_table(pool.group)["bundles_to_node_id"]
        found[name] = [ips[nodes[bundle]] for bundle in pool.bundles]
    found["busy"] = refusal(job(head, 4, 1))
    rank = ray.remote(LearnerRank).options(num_cpus=1, **pools["learner"].options(0)).remote(config, "", 0, None)
    found["meet_at"] = ray.get(rank.address.remote())
    found["ray"] = Cluster(dashboard).ray_version
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
