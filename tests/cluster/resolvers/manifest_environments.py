"""The environment that each pod of a manifest gets: what the file sets, and what the platform's controllers add."""

import copy
import json
import re


def pods_of_jobset(jobset, *, gke=False):
    """Each pod's environment, in the order of jobs and completion indices.

    JobSet names its jobs JOBSET-REPLICATEDJOB-INDEX, the pods' host names add the completion index, their domain is the
    JobSet's name; `spec.coordinator` becomes an annotation (kubernetes-sigs/jobset, pkg/controllers/jobset_controller.go,
    `CoordinatorEndpoint`). Kubernetes sets JOB_COMPLETION_INDEX in the pods of an Indexed Job, and JobSet makes Jobs
    Indexed by default (pkg/webhooks/jobset_webhook.go).

    GKE adds the TPU variables to pods that ask for google.com/tpu (GKE's webhook; "Deploy TPU workloads in GKE", "Deploy
    TPU multislices in GKE"; jax/_src/clusters/cloud_tpu_cluster.py reads them).
    """
    name = jobset["metadata"]["name"]
    annotations = {}
    if coordinator := jobset["spec"].get("coordinator"):
        host = f"{name}-{coordinator['replicatedJob']}-{coordinator['jobIndex']}-{coordinator['podIndex']}"
        annotations["jobset.sigs.k8s.io/coordinator"] = f"{host}.{name}"
    pods = []
    for replicated in jobset["spec"]["replicatedJobs"]:
        job = replicated["template"]["spec"]
        replicas = replicated.get("replicas", 1)
        assert job.get("completionMode", "Indexed") == "Indexed"
        assert job["parallelism"] == job["completions"]
        (container,) = job["template"]["spec"]["containers"]
        for slice_id in range(replicas):
            hosts = [f"{name}-{replicated['name']}-{slice_id}-{i}.{name}" for i in range(job["completions"])]
            for index in range(job["completions"]):
                added = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
                if gke:
                    assert "google.com/tpu" in container["resources"]["limits"]
                    added |= {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": ",".join(hosts)}
                if gke and replicas > 1:
                    added |= {
                        "MEGASCALE_COORDINATOR_ADDRESS": f"{name}-{replicated['name']}-0-0.{name}",
                        "MEGASCALE_NUM_SLICES": str(replicas),
                        "MEGASCALE_SLICE_ID": str(slice_id),
                    }
                own = job["template"].get("metadata", {}).get("annotations", {})
                of_pod = annotations | own | {"batch.kubernetes.io/job-completion-index": str(index)}
                pods.append(added | declared(container, of_pod))
    return pods


def declared(container, annotations):
    """The variables that a container's `env` sets, as the kubelet does it: field references, then $(NAME)."""
    found = {}
    for entry in container.get("env", []):
        if "secretKeyRef" in entry.get("valueFrom", {}):
            found[entry["name"]] = f"the secret's {entry['valueFrom']['secretKeyRef']['key']}"
        elif "valueFrom" in entry:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            found[entry["name"]] = annotations[re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]]
        else:
            found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], entry["value"])
    return found


def jobset_of_trainjob(runtime, trainjob):
    """The JobSet that Kubeflow Trainer makes of a TrainJob and its runtime.

    Source: kubeflow/trainer, pkg/runtime/framework/plugins/jax/jax.go (the variables, port 29500 of
    pkg/constants/constants.go) and plugins/jobset/builder.go (image, command).
    """
    assert runtime["spec"]["mlPolicy"]["jax"] == {}
    reference, trainer = trainjob["spec"]["runtimeRef"], trainjob["spec"]["trainer"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    (replicated,) = spec["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = replicated["template"]["spec"]
    job["parallelism"] = job["completions"] = trainer["numNodes"]
    (container,) = job["template"]["spec"]["containers"]
    assert (replicated["name"], container["name"]) == ("node", "node")
    container |= {"image": trainer["image"], "command": trainer["command"]}
    name = trainjob["metadata"]["name"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container["env"] = [
        *trainer.get("env", []),
        {"name": "JAX_NUM_PROCESSES", "value": str(trainer["numNodes"])},
        {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{name}-node-0-0.{name}:29500"},
    ]
    return {"metadata": trainjob["metadata"], "spec": spec}


def pods_of_tfjob(tfjob):
    """Each pod's environment. Source: kubeflow/training-operator, pkg/controller.v1/tensorflow/tensorflow.go.

    TF_CONFIG goes into the container named `tensorflow`, whose port `tfjob-port` counts; an evaluator is not in the
    cluster.
    """
    name, namespace = tfjob["metadata"]["name"], tfjob["metadata"]["namespace"]
    cluster = {}
    for role, replica in tfjob["spec"]["tfReplicaSpecs"].items():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == "tfjob-port"]
        if role != "Evaluator":
            job = role.lower()
            cluster[job] = [f"{name}-{job}-{i}.{namespace}.svc:{port}" for i in range(replica["replicas"])]
    pods = []
    for role, replica in tfjob["spec"]["tfReplicaSpecs"].items():
        for index in range(replica["replicas"]):
            task = {"type": role.lower(), "index": index}
            config = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
            pods.append({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TF_CONFIG": config})
    return pods
