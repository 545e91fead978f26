"""The wire without the SDK's client: what arrives twice, too early, or not at all."""

import httpx
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.support.local_server import ALICE


class Wire:
    def __init__(self, server, key=ALICE):
        self.http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": key}, timeout=600)

    def post(self, route, **body):
        return self.http.post(f"/{route}", json=body)

    def forward_backward(self, model, seq, data, loss="cross_entropy", forward_only=False):
        body = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=None)
        request = types.ForwardBackwardRequest(forward_backward_input=body, model_id=model.model_id, seq_id=seq)
        message = forward_backward_request_to_proto(request)
        message.forward_only = forward_only
        headers = {"Content-Type": "application/x-protobuf"}
        return self.http.post("/forward_backward", content=message.SerializeToString(), headers=headers).json()["request_id"]

    def optim_step(self, model, seq, **params):
        params = {"learning_rate": 1e-2, "eps": 0.1, "weight_decay": 0.1, **params}
        return self.post("optim_step", model_id=model.model_id, seq_id=seq, adam_params=params).json()["request_id"]

    def result(self, request_id):
        while True:
            answer = self.post("retrieve_future", request_id=request_id)
            if answer.status_code != 408:
                return answer

    def failure(self, request_id):
        answer = self.result(request_id).json()
        assert answer["category"] == "user"
        return answer["error"]
