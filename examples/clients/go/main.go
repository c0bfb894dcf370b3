// Takes this workload's certificate from the agent's SDS socket: go run . [SOCKET]
//
// Prints the chain and the roots; the key stays in the variable. Left open, the stream brings each renewal.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tls "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secrets "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const secretType = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

// get returns the first answer for a name and acknowledges it.
func get(ctx context.Context, client secrets.SecretDiscoveryServiceClient, name string) (*tls.Secret, error) {
	stream, err := client.StreamSecrets(ctx)
	if err != nil {
		return nil, err
	}
	// An SDS server asks for a node.
	node := &core.Node{Id: "sds-client"}
	request := &discovery.DiscoveryRequest{Node: node, TypeUrl: secretType, ResourceNames: []string{name}}
	if err := stream.Send(request); err != nil {
		return nil, err
	}
	answer, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	request.VersionInfo, request.ResponseNonce = answer.VersionInfo, answer.Nonce
	if err := stream.Send(request); err != nil {
		return nil, err
	}
	if len(answer.Resources) != 1 {
		return nil, fmt.Errorf("%s: %d resources", name, len(answer.Resources))
	}
	secret := &tls.Secret{}
	return secret, answer.Resources[0].UnmarshalTo(secret)
}

func main() {
	socket := "/var/run/secrets/workload-spiffe-uds/socket"
	if len(os.Args) > 1 {
		socket = os.Args[1]
	}
	connection, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := secrets.NewSecretDiscoveryServiceClient(connection)
	identity, err := get(ctx, client, "default")
	if err != nil {
		log.Fatal(err)
	}
	roots, err := get(ctx, client, "ROOTCA")
	if err != nil {
		log.Fatal(err)
	}
	chain := identity.GetTlsCertificate().GetCertificateChain().GetInlineBytes()
	anchors := roots.GetValidationContext().GetTrustedCa().GetInlineBytes()
	fmt.Printf("%s%s", chain, anchors)
}
