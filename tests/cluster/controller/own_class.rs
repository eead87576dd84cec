//! DeviceClasses of an administrator's own that the controller places: `deploy/examples/own-class.yaml` and variants.

use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use super::place::env;
use super::{wait_placed, wait_told};
use crate::manifests::{as_nobody, by_template, claim, template, user_of};
use crate::rig::{root, wait_until};
use crate::test_cluster::{PATIENCE, TestCluster, from};

/// The selector by which a class is the controller's.
const MARK: &str =
    "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'placed-by-controller'";

/// A class that goes with the test: these selectors, and a share unless a claim says otherwise.
async fn create_class(cluster: &TestCluster, name: &str, selectors: &[&str]) -> String {
    let name = format!("{}-{name}", cluster.namespace);
    let selectors: Vec<Value> = selectors.iter().map(|text| json!({"cel": {"expression": text}})).collect();
    let mut config =
        crate::manifests::parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "2000Mi"}));
    config[0].as_object_mut().expect("an entry").remove("requests");
    let class = json!({"metadata": {"name": name}, "spec": {"selectors": selectors, "config": config}});
    cluster.rig.on_end(&["kubectl", "delete", "deviceclass", &name, "--ignore-not-found"]);
    let classes = Api::<DeviceClass>::all(cluster.client.clone());
    classes.create(&PostParams::default(), &from(class)).await.expect("the class can be created");
    name
}

fn of_class(class: &str) -> Value {
    json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}]})
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_template_of_an_administrators_class_gets_the_share_that_the_class_says() {
    let test = "a_template_of_an_administrators_class_gets_the_share_that_the_class_says";
    let cluster = super::cluster(test).await;
    // As the file has it, with an image that the rig has.
    let example =
        std::fs::read_to_string(root().join("deploy/examples/own-class.yaml")).expect("it is there");
    let example = example.replace("docker.io/library/ubuntu:24.04", "docker.io/local/glibc:1");
    let file = std::env::temp_dir().join(format!("{}-own-class.yaml", cluster.namespace));
    std::fs::write(&file, example).expect("a file can be written");
    cluster.rig.on_end(&["kubectl", "delete", "deviceclass", "team-a-shares", "--ignore-not-found"]);
    cluster.rig.kubectl(&["-n", &cluster.namespace, "apply", "-f", &file.display().to_string()]);
    std::fs::remove_file(&file).expect("the file is there");
    cluster.wait_ready("own-class").await;
    let limits = env(&cluster, "own-class");
    assert!(limits.contains(&"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20".to_owned()), "{limits:?}");
    assert!(limits.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3000M".to_owned()), "{limits:?}");
    // The claim's own share counts in place of the class's.
    let mut devices = of_class("team-a-shares");
    devices["config"] =
        crate::manifests::parameters("tranche.dev/v1alpha1", "GpuShare", json!({"memory": "1000Mi"}));
    cluster.create(claim("more", devices)).await;
    cluster.create(as_nobody(user_of("more", "more"))).await;
    cluster.wait_ready("more").await;
    let limits = env(&cluster, "more");
    assert!(limits.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1000M".to_owned()), "{limits:?}");
    assert!(!limits.iter().any(|one| one.contains("PERCENTAGE")), "{limits:?}");
    // Shares outlive their class, and are released like others.
    let classes = Api::<DeviceClass>::all(cluster.client.clone());
    classes.delete("team-a-shares", &DeleteParams::default()).await.expect("it can be deleted");
    super::create(&cluster, "beside", json!({"memory": "1Gi"})).await;
    cluster.wait_ready("beside").await;
    assert_eq!(wait_placed(&cluster, "beside").await, wait_placed(&cluster, "more").await);
    cluster.end().await;
}

#[tokio::test]
#[ignore = "needs a rig"]
async fn selectors_of_a_class_that_choose_nothing_are_told_and_a_class_of_the_schedulers_is_none_of_ours() {
    let test =
        "selectors_of_a_class_that_choose_nothing_are_told_and_a_class_of_the_schedulers_is_none_of_ours";
    let cluster = super::cluster(test).await;
    let t4 = "device.attributes['gpu.nvidia.com'].productName == 'Tesla T4'";
    let class = create_class(&cluster, "t4", &[MARK, t4]).await;
    cluster.create(template("t4", of_class(&class))).await;
    cluster.create(as_nobody(by_template("t4", "t4"))).await;
    let told = wait_told(&cluster, "t4", super::WAITS).await;
    assert!(told.contains(&format!("the selectors of DeviceClass {class} count, too")), "{told}");
    // The selector that leaves the GPUs out, and which products there are.
    assert!(told.contains(&format!("that a selector leaves out (\"{t4}\"")), "{told}");
    assert!(told.contains("they are NVIDIA H100"), "{told}");
    let said = super::explain::why(&cluster, "pod/t4");
    assert!(said.contains(&format!("the selectors of DeviceClass {class} choose none of ")), "{said}");
    // Another selector, and it is served at once.
    let patch = json!([{"op": "replace", "path": "/spec/selectors/1/cel/expression",
        "value": "device.attributes['gpu.nvidia.com'].productName.contains('H100')"}]);
    cluster.rig.kubectl(&["patch", "deviceclass", &class, "--type=json", "-p", &patch.to_string()]);
    cluster.wait_ready("t4").await;

    // kube-scheduler finds a GPU for this one and gives it whole, which its config does not go with: the node says so.
    let class =
        create_class(&cluster, "both", &[&format!("{MARK} || device.driver == 'gpu.nvidia.com'")]).await;
    cluster.create(claim("both", of_class(&class))).await;
    cluster.create(as_nobody(user_of("both", "both"))).await;
    let allocated = || async {
        let claim = cluster.api::<ResourceClaim>().get("both").await.ok()?;
        super::results(&claim).first().cloned()
    };
    let (_, granted) = wait_until("kube-scheduler to allocate it", PATIENCE, allocated).await;
    assert!(!granted, "the controller has kept off");
    cluster.wait_refused("both", &["GpuShare.memory"]).await;
    cluster.end().await;
}
