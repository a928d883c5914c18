"""What the platforms demand of the manifests in configs/cluster/, as far as these files go.

Written by hand from the custom resource definitions of JobSet (config/components/crd/bases), Kubeflow Trainer
(manifests/base/crds) and Kubeflow's training operator (manifests/base/crds), and from Kubernetes' own Job and Pod. A
schema maps each field that a file may have to what it holds; a required one ends with "!".
"""

import re

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
QUANTITY = (int, str)


def at_least(least):
    def check(value, where):
        assert isinstance(value, int), where
        assert not isinstance(value, bool), where
        assert value >= least, where

    return check


def name(value, where):
    assert isinstance(value, str), where
    assert NAME.fullmatch(value), f"{where}: {value}"


def texts(value, where):
    assert all(isinstance(key, str) and isinstance(text, str) for key, text in value.items()), where


VALUE_FROM = {"fieldRef": {"fieldPath!": str}, "secretKeyRef": {"name!": name, "key!": str}}
CONTAINER = {
    "name!": name,
    "image!": str,
    "workingDir": str,
    "command": [str],
    "env": [{"name!": str, "value": str, "valueFrom": VALUE_FROM}],
    "ports": [{"name": name, "containerPort!": at_least(1)}],
    "resources": {"limits": lambda value, where: [check(v, QUANTITY, where) for v in value.values()]},
    "securityContext": {"privileged": bool},
    "readinessProbe": {"grpc": {"port!": at_least(1), "service": str}},
    "volumeMounts": [{"name!": name, "mountPath!": str}],
}
POD = {
    "metadata": {"labels": texts, "annotations": texts},
    "spec!": {
        "containers!": [CONTAINER],
        "restartPolicy": {"Never", "OnFailure", "Always"},
        "terminationGracePeriodSeconds": at_least(0),
        "hostNetwork": bool,
        "dnsPolicy": {"ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"},
        "nodeSelector": texts,
        "volumes": [
            {
                "name!": name,
                "persistentVolumeClaim": {"claimName!": name},
                "emptyDir": {"medium": {"", "Memory"}},
                "secret": {"secretName!": name},
            }
        ],
    },
}
JOB = {
    "parallelism": at_least(1),
    "completions": at_least(1),
    "completionMode": {"Indexed", "NonIndexed"},
    "backoffLimit": at_least(0),
    "podFailurePolicy": {
        "rules!": [
            {
                "action!": {"FailJob", "FailIndex", "Ignore", "Count"},
                "onExitCodes": {"containerName": name, "operator!": {"In", "NotIn"}, "values!": [at_least(1)]},
            }
        ]
    },
    "template!": POD,
}
JOBSET_SPEC = {
    "coordinator": {"replicatedJob!": name, "jobIndex": at_least(0), "podIndex": at_least(0)},
    "successPolicy": {"operator!": {"All", "Any"}, "targetReplicatedJobs": [name]},
    "failurePolicy": {
        "maxRestarts": at_least(0),
        "rules": [
            {
                "name!": name,
                "action!": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
                "onJobFailureReasons": [{"PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"}],
            }
        ],
    },
    "replicatedJobs": [
        {
            "name!": name,
            "replicas": at_least(1),
            "template!": {"metadata": {"labels": texts, "annotations": texts}, "spec!": JOB},
        }
    ],
}
METADATA = {"name!": name, "namespace": name, "labels": texts, "annotations": texts}
SCHEMAS = {
    "JobSet": {
        "apiVersion!": {"jobset.x-k8s.io/v1alpha2"},
        "kind!": {"JobSet"},
        "metadata!": METADATA,
        "spec!": JOBSET_SPEC,
    },
    "TrainingRuntime": {
        "apiVersion!": {"trainer.kubeflow.org/v1alpha1"},
        "kind!": {"TrainingRuntime"},
        "metadata!": METADATA,
        "spec!": {
            "mlPolicy": {"numNodes": at_least(1), "jax": {}},
            "template!": {"metadata": {"labels": texts, "annotations": texts}, "spec!": JOBSET_SPEC},
        },
    },
    "TrainJob": {
        "apiVersion!": {"trainer.kubeflow.org/v1alpha1"},
        "kind!": {"TrainJob"},
        "metadata!": METADATA,
        "spec!": {
            "runtimeRef!": {
                "name!": name,
                "apiGroup": {"trainer.kubeflow.org"},
                "kind": {"TrainingRuntime", "ClusterTrainingRuntime"},
            },
            "trainer": {
                "image": str,
                "command": [str],
                "args": [str],
                "numNodes": at_least(1),
                "env": CONTAINER["env"],
                "resourcesPerNode": CONTAINER["resources"],
            },
        },
    },
    "TFJob": {
        "apiVersion!": {"kubeflow.org/v1"},
        "kind!": {"TFJob"},
        "metadata!": METADATA,
        "spec!": {
            "runPolicy": {
                "backoffLimit": at_least(0),
                "cleanPodPolicy": {"None", "Running", "All"},
            },
            "enableDynamicWorker": bool,
            "tfReplicaSpecs!": {
                role: {
                    "replicas": at_least(1),
                    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
                    "template!": POD,
                }
                for role in ("Chief", "Worker", "PS", "Evaluator")
            },
        },
    },
}


def check(value, schema, where=""):
    """Assert that a value is what a schema says: a type, a set of words, a list, a mapping, or a function that asserts."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        fields = {field.removesuffix("!"): inner for field, inner in schema.items()}
        missing = {field[:-1] for field in schema if field.endswith("!")} - set(value)
        assert not missing, f"{where}: {missing} missing"
        assert set(value) <= set(fields), f"{where}: {set(value) - set(fields)} unknown"
        for field, inner in value.items():
            check(inner, fields[field], f"{where}.{field}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        assert value, f"{where} is empty"
        for i, inner in enumerate(value):
            check(inner, schema[0], f"{where}[{i}]")
    elif isinstance(schema, set):
        assert value in schema, f"{where}: {value}"
    elif isinstance(schema, type | tuple):
        assert isinstance(value, schema), f"{where}: {value!r}"
    else:
        schema(value, where)
